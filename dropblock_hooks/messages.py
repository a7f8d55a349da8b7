"""The texts of all findings and warnings, in one table. docs/troubleshooting.md explains them.

A name in braces is replaced by a value, ``{why}`` and ``{cure}`` by those of a `Cause`. A text says
what happened, and its cure what to do.

Most findings are made by the functions of ``diagnosis``.
"""

from .findings import Cause, Kind, Message, Severity

# a site that can't act any more

REPLACED = Message(
    Kind.REPLACED,
    "its layer was replaced or removed after attach, or the hook was taken off",
    "Call attach again",
    Severity.ERROR,
)
# these texts have the cure, because `shard_refusal` shows only the text
SHARDED = Message(
    Kind.SHARDED,
    "{sharding} shards the parameter, and each process has a part of its gradient only: "
    "regularize the gradient at the output of the layer",
    severity=Severity.ERROR,
)
SHARDED_BACKWARD = Message(
    Kind.SHARDED,
    "{sharding} shards the parameter, and each process has a part of its gradient only: "
    "write when='accumulated', and pass attach(..., optimizer=optimizer)",
    severity=Severity.ERROR,
)
SHARDED_ANCHOR = Message(
    Kind.SHARDED,
    "{sharding} shards the parameter, and its value at attach can't be kept in parts: add the "
    "gradient of the penalty to parameter.grad yourself, before optimizer.step()",
    severity=Severity.ERROR,
)
PARAMETER_GONE = Message(
    Kind.LOST,
    "the layer no longer has the parameter '{name}'",
    "Call attach again, with the names that model.named_parameters() has now",
    Severity.ERROR,
)
PARAMETER_SWAPPED = Message(
    Kind.LOST,
    "the layer holds another tensor now, and its hook is no longer there",
    "Run a forward that is not compiled, or call step(): both hook a new parameter",
    Severity.ERROR,
)
FROZEN = Message(
    Kind.LOST,
    "the parameter is frozen (requires_grad is False) and gets no gradient",
    "Unfreeze it, or leave it out of the spec. If its layer was wrapped after attach, attach after "
    "that",
    Severity.ERROR,
)

OVERWRITTEN = Message(
    Kind.OVERWRITTEN,
    "optimizer.step() computes the gradient of the parameter from grad_sample, as with Opacus, so "
    "a hook in the backward comes too early and has no effect",
    'Use when="accumulated" and pass the optimizer, attach(..., optimizer=optimizer)',
    Severity.ERROR,
)

_ABOUT_SKIPPED = (
    "Look at the batch and the learning rate, or choose another bound; the report has the share of "
    "the updates that were left out"
)
SKIPPED_UPDATE = Message(
    Kind.SKIPPED,
    "left out an update of the optimizer: the norm of the gradient was {norm:.4g}",
    _ABOUT_SKIPPED,
)
SKIPPED_UPDATES = Message(
    Kind.SKIPPED,
    "left out {skipped} of {updates} updates of the optimizer ({percent:.0f} %)",
    _ABOUT_SKIPPED,
)

SPLIT_GROUP = Message(
    Kind.IN_PARTS,
    "its norm is taken in parts, because {optimizers} optimizers hold the parameters of this "
    "entry, and each step clips its own",
    "Write one entry for the parameters of each optimizer, or clip after the backward",
)

# a site that did nothing, and the causes

NEVER_CALLED = Message(
    Kind.NEVER_CALLED, "the layer was never called: {why}", "{cure}", Severity.ERROR
)
NEVER_CALLED_IN_TRAINING = Message(
    Kind.NEVER_CALLED,
    "the layer was never called in training mode: {why}",
    "{cure}",
    Severity.ERROR,
)
NO_GRADIENT_NO_CALL = Message(
    Kind.NEVER_ACTIVE,
    "the layer was never called, and the parameter got no gradient: {why}",
    "{cure}",
    Severity.ERROR,
)
NO_GRADIENT_IN_TRAINING = Message(
    Kind.NEVER_ACTIVE,
    "the layer was never called in training mode, and the parameter got no gradient: {why}",
    "{cure}",
    Severity.ERROR,
)
NEVER_ACTIVE = Message(
    Kind.NEVER_ACTIVE,
    "the layer was called {calls} and never active: {why}",
    "{cure}",
    Severity.ERROR,
)

FROZEN_LAYER = Cause(
    "the layer is in evaluation mode inside a training model (frozen)",
    "Call train() on the layer, or use active='always'",
)
PAUSED = Cause("the attachment is paused", "Set attached.enabled = True")
NO_GRADIENT_REACHED = Cause(
    "no gradient reached it",
    "Look for a detach() or no_grad() behind the layer, or for a loss that is computed inside it",
)
NEEDS_NO_GRADIENT = Cause(
    "its tensor needs no gradient, because nothing in front of the layer is trained",
    "Leave it out of the spec, or unfreeze a layer in front of it; or take away the no_grad() "
    "around it",
)
NOT_WHILE_TRAINING = Cause(
    "it was in evaluation mode, or not called, while the model was trained",
    "Call train() on the layer, or leave it out of the spec",
)
RAISED = Cause("each of its calls in training mode raised an error", "Repair this error first")
ONLY_EVALUATED = Cause(
    "the model only ran in evaluation mode", "Call model.train() before training"
)
ONLY_LAYERS_CALLED = Cause(
    "the model itself was not called, only layers inside it", "Name these layers"
)
FUSED_ATTENTION = Cause(
    "fused attention uses the weights and drops values without calling this layer",
    "Name the attention (index=0 of nn.MultiheadAttention) or the projection behind it, or set "
    "fused_attn = False",
)
NOT_IN_COMPILED_CODE = Cause(
    "torch.compile runs code that does not call it, such as code of an equal block after a graph "
    "break, or code in which its branch is not taken",
    "Call torch.compiler.reset() after attach, and find graph breaks with fullgraph=True; if the "
    "same is reported without torch.compile, name the parent",
)
SELDOM_CALLED = Message(
    Kind.NEVER_CALLED,
    "its layer was called in {calls} and others in {most}: {why}",
    "{cure}",
)
CONTAINER = Cause(
    "a branch not taken, or a container that the model loops over, as checkpointing does",
    "Name the layers inside it",
)
BRANCH_NOT_TAKEN = Cause(
    "forward() does not call it, or took another branch; or its parent uses the layer without "
    "calling it (it reads the weight, as a fused cross entropy does, or calls forward() directly)",
    "Name a layer that is called, such as the parent, or switch the fused function off",
)

# regularizers of accumulated gradients

_PASS_OPTIMIZER = "Pass optimizer=optimizer to attach, or set attached.optimizer = optimizer"
NO_OPTIMIZER = Message(
    Kind.NO_OPTIMIZER,
    "gradients are regularized at the steps of the optimizer, and no optimizer is known in this "
    "forward",
    _PASS_OPTIMIZER,
)
STEP_UNKNOWN = Message(
    Kind.NO_OPTIMIZER,
    "the gradient was not regularized at any optimizer step: the optimizer is not known",
    _PASS_OPTIMIZER,
    Severity.ERROR,
)
NO_STEP = Message(
    Kind.NEVER_ACTIVE,
    "the gradient was not regularized at any optimizer step: no known optimizer with the parameter "
    "made a step, or it had no gradient",
    "Pass the optimizer that makes the steps now, attached.optimizer = optimizer, or a list of "
    "all. If a GradScaler has skipped all steps, look for NaN or Inf",
    Severity.ERROR,
)
NO_STEP_YET = Message(
    Kind.NEVER_ACTIVE,
    "the gradient was not regularized at any optimizer step: no step has changed the parameter in "
    "this epoch yet. A GradScaler may have skipped the step",
    "Call verify() after an update",
    Severity.NOTE,
)
UPDATES_WITHOUT_IT = Message(
    Kind.NEVER_ACTIVE,
    "the gradient was not regularized at any optimizer step: it had no gradient, while other "
    "parameters of the optimizer had one",
    "Look for a layer that the forward does not use, or for a detach() behind it; "
    "requires_grad_(False) on the parameter silences this",
    Severity.ERROR,
)

# a site that does something else than is meant

NO_BATCH = Message(
    Kind.NO_BATCH,
    "axis 0 of its tensor has {samples} elements and the batch has {batch}, so it does not act on "
    "whole samples",
    "Put it on a layer whose axis 0 is the batch, such as the block around it, or say layout= if "
    "these elements are samples",
)
OWN_RATE = Message(
    Kind.OWN_RATE,
    "other code has set {attribute} of the layer to {value:g}, and Retune has set it back, so that "
    "only its own rate acts",
    "Use attached.set(...) for another rate, or remove the Retune",
)
ZERO_RATE = Message(
    Kind.ZERO_RATE,
    "the rate was 0 in each of {calls}, so it changed nothing",
    "Give it a rate, or a schedule that rises above 0, or leave it out of the spec",
)

# the training loop

REMOVED = Message(Kind.REMOVED, "the attachment was removed", "Call attach again", Severity.ERROR)
NOT_RUN = Message(
    Kind.NOT_RUN,
    "no layer was called in this epoch, or since attaching or loading",
    "Run a training step first. If you did, another model was trained: attach to that one",
    Severity.ERROR,
)
FORWARD_RAISED = Message(
    Kind.NOT_RUN,
    "each training forward of this epoch raised an error, so nothing is known about the sites",
    "Repair this error first",
    Severity.ERROR,
)
_TRAIN_THIS_MODEL = (
    "Call model.train() before training. If another model is trained (a trainer may have copied "
    "this one), attach to that one"
)
NOT_TRAINED = Message(
    Kind.NOT_TRAINED,
    "an epoch has ended in which this {model} was not trained",
    _TRAIN_THIS_MODEL + ". If this one is trained with torch.compile, its compiled code calls none "
    "of these layers: call torch.compiler.reset() after attach",
)
EVALUATED = Message(
    Kind.NOT_TRAINED,
    "an epoch has ended in which this {model} was not trained: it ran {forwards} in evaluation "
    "mode",
    _TRAIN_THIS_MODEL,
)
NEVER_TRAINED = Message(
    Kind.NOT_TRAINED,
    "the model ran {forwards} in evaluation mode and none in training mode, so nothing acted",
    "Call model.train() before training, or use active='always'",
)
_STEP_FIRST = "Call attached.step(epoch) before the first batch of each epoch"
NOT_STEPPED = Message(
    Kind.NOT_STEPPED,
    "the rate of {key} is still {rate} in call {calls} of the layer, since nobody has called step",
    _STEP_FIRST + ". If the rate should keep its value of epoch 0, call attached.step(0) once",
)
STEPPED_LATE = Message(
    Kind.NOT_STEPPED,
    "step(0) came after {early} training calls, and step(1) after {later} more: each epoch is "
    "trained with the rates of the epoch before it",
    _STEP_FIRST,
)

# several processes

DIFFERS = Message(Kind.DIFFERS, "the ranks differ: {values}", severity=Severity.ERROR)
EQUAL_SEEDS = Message(
    Kind.EQUAL_GENERATORS,
    "several ranks have the same torch.initial_seed() and draw the same masks",
    "Seed each data-parallel rank differently: torch.manual_seed(seed + rank). The ranks of a "
    "tensor-parallel group need equal seeds",
)

# the loss scale

GRAD_SCALER = Message(
    Kind.GRAD_SCALER,
    "the forward runs under autocast to float16, and the attachment knows no GradScaler: a scaler "
    "multiplies the gradients, for example by 65536, and bounds would be compared with the result",
    "If a GradScaler scales this model's loss, pass it, attach(..., grad_scaler=scaler), or set "
    "attached.grad_scaler = scaler; otherwise pass grad_scaler=False",
)

# the spec and the dry run

DROPPED_TWICE = Message(
    Kind.DROPPED_TWICE,
    "{ours} and the model's own {theirs} drop the same values, together {share}",
    "Put Retune on that layer instead, or leave one of the two out",
)
WHOLE_MAP = Message(
    Kind.CLIPPED,
    "the block is as large as the map ({size}): it drops whole channels",
    "Ask for a smaller block_size, or use a dropout of channels",
)
CLIPPED = Message(
    Kind.CLIPPED,
    "the blocks are clipped to the map: {block} of {size}",
    "Ask for a smaller block_size, or use a dropout of channels",
)
DROPS_MOST = Message(
    Kind.SPEC,
    "with p={p:g}, it drops more than half of the values",
    "p is the share that is dropped: a keep_prob of 0.9 is p=0.1",
    Severity.NOTE,
)
RECOMPILES = Message(
    Kind.RECOMPILES,
    "torch.compile reads the rate as a constant, and may compile again for each value",
    "Use a StepSchedule of few values",
    Severity.NOTE,
)
LOSES_SAMPLES = Message(
    Kind.LOSES_SAMPLES,
    "it loses the whole sample, since no shortcut runs around the layer",
    "Use StochasticDepth on a block, or DropPath on its branch",
)
NO_PASS = Message(Kind.NO_PASS, "no shapes, since {error}")

# the rules of a Watchdog

WITH_EFFECTS = "{text}. Likely effects of it: {effects}"
FIRST_BAD_CALL = "The first measured call with NaN or Inf was call {call} of the layer"
FIRST_BAD_GRADIENT = "The first gradient with NaN or Inf was that of call {call} of the layer"
ROWS_OF_OUTPUT = "Largest magnitude of its output in the last {calls} before ({numbers}): {values}"
ROWS_OF_GRADIENT = "Norm of its gradient in the last {calls} before ({numbers}): {values}"

BAD_GRADIENT = Message(
    Kind.NONFINITE,
    "a gradient that is not finite (NaN or Inf) reached its output, as the first of the watched "
    "layers: the loss or the code behind this layer made it",
    "Look behind the layer for a root, norm or logarithm at 0, an overflow, or -Inf in masked "
    "logits. If the gradients grew before, lower the learning rate. If a GradScaler scales this "
    "loss, pass it, attach(..., grad_scaler=scaler), so that its overflows are not reported",
    Severity.ERROR,
)
BAD_SCALED_GRADIENT = Message(
    Kind.NONFINITE,
    BAD_GRADIENT.text,
    "The GradScaler is not recovering: run this layer in float32",
    Severity.ERROR,
)
MADE_BAD_VALUES = Message(
    Kind.NONFINITE,
    "its output held NaN or Inf in {bad} of {calls} measured calls, and its input was finite",
    "Look there for a division by 0, a logarithm or root of 0, an exponential, an overflow in half "
    "precision, or an attention mask of only -inf. If the values grew before, lower the learning "
    "rate{more}",
    Severity.ERROR,
)
GOT_BAD_VALUES = Message(
    Kind.NONFINITE,
    "its output held NaN or Inf in {bad} of {calls} measured calls, and so did its input: the "
    "batch, or code that is not watched, made them",
    "Check the inputs{more}",
    Severity.ERROR,
)
_NOT_MEASURED = (
    ". The first NaN or Inf came {when}, in a forward that was not measured, so another layer, the "
    "batch or the loss may have made it. From now on, each forward is measured"
)
_GO_BACK = (
    "Not finite now: {parameters}. Go back to a checkpoint, and train on: the layer is named if it "
    "happens again. With every=1, each forward is measured from the start. If the values grew "
    "before, lower the learning rate, or clip gradients (ClipGradNorm)"
)
BAD_OUTPUT_LATER = Message(
    Kind.NONFINITE,
    "its output held NaN or Inf in training forward {forward}, and was finite before"
    + _NOT_MEASURED,
    _GO_BACK,
    Severity.ERROR,
)
BAD_PARAMETERS_LATER = Message(
    Kind.NONFINITE,
    "its parameters hold NaN or Inf after training forward {forward}" + _NOT_MEASURED,
    _GO_BACK,
    Severity.ERROR,
)
VANISHING = Message(
    Kind.VANISHING,
    "gradient norms of the first {first} of {layers} layers are at most {early:.3g}, and "
    "{late:.3g} at the last layers, up to '{last}'",
    "Add shortcuts or normalization, or start with larger weights",
)
EXPLODING = Message(
    Kind.EXPLODING,
    "gradient norms of the first {first} of {layers} layers are at least {early:.3g}, and "
    "{late:.3g} at the last layers, up to '{last}'",
    "Start with smaller weights, add normalization, or clip (ClipGradNorm)",
)
EXPLODING_LATER = Message(
    Kind.EXPLODING,
    EXPLODING.text,
    "Earlier looks did not find it, so the training has made it: lower the learning rate, or clip "
    "(ClipGradNorm)",
)
DEAD = Message(
    Kind.DEAD,
    "{share:.0%} of its {channels} channels were always zero",
    "Lower the learning rate, check the bias in front, or use a leaky activation",
)
SATURATED = Message(
    Kind.SATURATED,
    "{share:.0%} of its values were within 1 % of its bounds",
    "Start with smaller weights in front, or add normalization there",
)
NO_GRADIENT = Message(
    Kind.NO_GRADIENT,
    "no gradient, or only zeros, reached it in {calls} measured calls",
    "Look behind it for a detach(), no_grad(), a mask, dead units, or a branch without loss; a "
    "layer that the model never calls can be removed. If it is not meant to be trained, as a "
    "target network or a teacher, call requires_grad_(False) on it",
)
_OF_ALL = "in {layers} of the {trained} layers with trained parameters, among them {names}"
UPDATED_BY_NOTHING = Message(
    Kind.NO_UPDATE,
    "{updates} updates of the optimizer changed no value of its parameters; this is the case "
    + _OF_ALL,
    "Look for a learning rate of 0, or one that is too small for the type of the parameters",
)
NOT_UPDATED = Message(
    Kind.NO_UPDATE,
    "it gets gradients, and {updates} updates that changed other layers did not change its "
    "parameters; this is the case " + _OF_ALL,
    "Pass them to the optimizer, which may have been made before the layer, or freeze them: "
    "requires_grad_(False)",
)
ACCUMULATING = Message(
    Kind.ACCUMULATING,
    "the gradients of {parameters} of the {trained} trained parameters, among them {names}, were "
    "not cleared in {updates} updates, so each update also uses the gradients of earlier batches",
    "Call optimizer.zero_grad() once per update, for each optimizer",
)
EVAL_NORM = Message(
    Kind.EVAL_NORM,
    "it normalizes with its running statistics and does not change them, because it was in "
    "evaluation mode in {forwards} measured forwards of the training model, and its weight or bias "
    "is trained",
    "Call train() on the model after each evaluation. If it is meant, freeze its weight and bias "
    "too, requires_grad_(False), or use FreezeNorm",
)
EQUAL_INPUTS = Message(
    Kind.EQUAL_INPUTS,
    "all {samples} samples of the batch that enters the model here were equal, in each of "
    "{batches} measured forwards",
    "Look for a data set that returns one item for each index, a transform that makes the items "
    "equal, inputs of zeros, or one sample that is expanded. If it is meant, give watch or "
    "Watchdog the names of the other rules",
)

# warnings that are not findings

STEP_IN_BACKWARD = (
    "step() was called during a backward: activation checkpoints that are recomputed after it use "
    "the new rates, and their gradients are wrong; call step() after backward()"
)
AFTER_THE_END = (
    "step({t:g}) is later than the {epochs} epochs that attach was given, so rates keep their last "
    "values: step takes the epoch, and epoch + i / n inside it, not the number of a batch"
)
ANCHOR_BEFORE_LOADING = (
    "{sites}: the parameter has changed between attach and the first forward, and it is pulled to "
    "its value at attach; call attach after the weights are loaded or the layer is replaced, or "
    "also load the state of the attachment"
)
NO_SITE_OF_STATE = "the state has none of these sites, so only its epoch is restored"
NO_STATE_OF_CALLBACK = (
    "the checkpoint has no state of Regularize, because it was written without it: counts begin "
    "anew, and rates follow the time of the trainer"
)
NO_STATE_IN_FILE = (
    "{file} has no state of an Attachment, because it was written without one: counts begin anew, "
    "and rates follow attached.step(epoch)"
)
FINDER_WITHOUT_CALLBACK = (
    "{finder} searches without other callbacks, so without these regularizers: to search with "
    "them, call attach(module, spec) before, and remove() after it"
)
SAMPLE_CALLED_NO_LAYER = (
    "the {n} forwards called no layer of {sites}: are these layers used in evaluation?"
)
EQUAL_SAMPLES = (
    "all {n} samples are equal, although {selectors} should drop: does the forward of the module "
    "read this rate and its training flag?"
)
EMPTY_MAP = (
    "no position at layer {layer} raises the target's score in image {images}: the weighted sum is "
    "nowhere positive, and the map is all zeros"
)
NO_SHORTCUT = (
    "{site}: the output of the layer has another shape than its input, so there is no ratio of "
    "branch and shortcut. Other layers of this kind are not named"
)
_SEVERAL_KERNELS = (
    "so regularizers on a GPU start several kernels where one would do. Install {triton}. Set "
    "DROPBLOCK_HOOKS_TRITON=0 to use torch operations without this warning"
)
NO_TRITON = "Triton can't be imported ({error}), " + _SEVERAL_KERNELS
OLD_TRITON = "triton {version} is older than {oldest}, " + _SEVERAL_KERNELS
KERNEL_FAILED = (
    "the Triton kernel {kernel} can't be used here ({error}), so regularizers on a GPU use torch "
    "operations, which start more kernels. Set DROPBLOCK_HOOKS_TRITON=0 to use them without this "
    "warning"
)
NOT_IN_GRAPH = (
    "torch.compile can't put the kernels of {operator} into its graph ({error}), so compiled code "
    "calls Python at each step. Results are the same. Set DROPBLOCK_HOOKS_IN_GRAPH=0 to have this "
    "without the warning"
)
