"""Regularizers, one family in each module. All take the options of `Regularizer` as keywords.

- `base`: `Regularizer`, with fields, rates and their ranges, options, and one method ``apply``
- `dropout`: Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, StochasticDepth, GaussianNoise,
  GaussianDropout, DropBlock1d, DropBlock2d, DropBlock3d, Disout
- `gradients`: ClampGrad, ClipGradNorm, ScaleGrad, ZeroGrad, GradNoise, DropGrad2d; and for
  parameters only: AdaptiveClipGrad, CentralizeGrad
- `neftune`: NEFTune, noise on the embeddings of a language model
- `penalties`: base of the penalties of activations, which add a gradient in the backward
- `z_loss`: ZLoss, a penalty on large logits of a language model or a router
- `activity`: ActivityL1 and ActivityL2, penalties on the size of activations
- `l2sp`: L2SP, a penalty on the distance of parameters from their values at ``attach``
- `freeze_norm`: FreezeNorm, norms that keep their running statistics in training
- `clamp_activation`: ClampActivation, a clamp or a soft cap
- `memory`: base of regularizers that remember the norms of earlier updates
- `adagc`, `zclip`, `skip_update`: AdaGC, ZClip and SkipUpdate, which act once per update
- `foreign`: Foreign, modules and functions of other libraries as regularizers; Retune, another
  rate for a layer that already drops
"""
