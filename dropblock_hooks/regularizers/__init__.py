"""Regularizers, one family a file. All take the options of `Regularizer` as keywords.

base        the regularizer: fields, rates and their ranges, options, one method ``apply``
dropout     Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, StochasticDepth, GaussianNoise,
            GaussianDropout, DropBlock1d, DropBlock2d, DropBlock3d, Disout
gradients   ClampGrad, ClipGradNorm, ScaleGrad, ZeroGrad, GradNoise, DropGrad2d; and of parameters
            only: AdaptiveClipGrad, CentralizeGrad
clamp_activation  ClampActivation: a clamp, or a soft cap
penalties   the base of penalties, which add a gradient to the one that comes back
activity    ActivityL1, ActivityL2: the size of activations
l2sp        L2SP: the distance of parameters from their values at attaching
z_loss      ZLoss: large logits of a language model or a router
neftune     NEFTune: noise on the embeddings of a language model
freeze_norm FreezeNorm: norms that keep their running statistics in training
foreign     Foreign: modules and functions of other libraries as regularizers; Retune: another rate
            for a layer that already drops; what it drops, and whether other code reads its rate
"""
