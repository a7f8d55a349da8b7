"""Regularizers, one family a file. All take the options of `Regularizer` as keywords.

rates       fields that take a number or a schedule, and their ranges
base        the regularizer: fields, rates, options, one method ``apply``
dropout     Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, StochasticDepth, GaussianNoise,
            GaussianDropout
dropblock   DropBlock1d, DropBlock2d, DropBlock3d, Disout
gradients   ClampGrad, ClipGradNorm, ScaleGrad, ZeroGrad, GradNoise, DropGrad2d; and of parameters
            only: AdaptiveClipGrad, CentralizeGrad
foreign     Foreign: modules and functions of other libraries
retune      Retune: another rate for a layer that already drops; what such a layer drops
"""
