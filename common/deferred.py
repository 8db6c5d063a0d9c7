"""Backward in two halves: the input's gradient now, the weights' gradient when the schedule has a hole.

    ordinary       backward ──► grad of x ──► grad of w ──► the layer below
    deferred       backward ──► grad of x ─────────────────► the layer below
                                └── (x, grad of y) ──► queue ··· W ──► grad of w, added to w.grad

Only the input's gradient is on the critical path: the rank below waits for it. `defer` changes how the Linear and
Conv2d modules of a model run, and nothing else about them: parameters, names and state dicts stay. Both halves compute
what autograd would have computed, with the same operations, so the gradients are equal to the last bit, in float32,
under autocast and when units are recomputed. (A layer used twice in one backward adds its two shares in another order.)

What is queued are activations and gradients that live until W: that memory is what `schedule.peak_held` counts.
"""

import itertools
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Work = Callable[[], None]


class WeightQueue:
    """Weight gradients that backward has left for later, and the casts of weights that autocast would have kept."""

    def __init__(self):
        self.pending: list[Work] = []
        self._casts: dict[int, Tensor] = {}

    def take(self) -> list[Work]:
        """Hand over what has been queued since the last call: the W that belongs to the B just done."""
        taken, self.pending = self.pending, []
        return taken

    def flush(self, work: list[Work] | None = None) -> None:
        """Compute weight gradients and add them to `.grad`: those given, or all that wait."""
        work = self.take() if work is None else work
        with torch.no_grad():
            # One by one, so that each layer's activations are freed as soon as they have served.
            while work:
                work.pop(0)()

    def begin_step(self) -> None:
        """Weights have changed. Their version counters cannot tell: torch's fused optimizers leave them as they were."""
        self._casts.clear()

    def cast(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The weight in the dtype of autocast: made once a step, not once for each micro-batch in flight."""
        if weight is None or weight.dtype == dtype:
            return None if weight is None else weight.detach()
        cast = self._casts.get(id(weight))
        if cast is None or cast.dtype != dtype:
            cast = self._casts[id(weight)] = weight.detach().to(dtype)
        return cast


def defer(model: nn.Module, queue: WeightQueue) -> list[str]:
    """Let the model's Linear and Conv2d layers leave their weight gradients in the queue; returns these layers' names.

    Everything else (norms, padded or derived layers, frozen weights) gets its gradient in backward as always.
    """
    names = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear or (type(module) is nn.Conv2d and _plain_padding(module)):
            module.forward = _Forward(module, queue)
            names.append(name)
    return names


def undo_defer(model: nn.Module) -> None:
    """Back to ordinary layers."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Forward):
            del module.forward


def _plain_padding(conv: nn.Conv2d) -> bool:
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


class _Forward:
    """The forward of one layer. It holds no parameters, so the module's state dict does not see it."""

    def __init__(self, module: nn.Module, queue: WeightQueue):
        self.module, self.queue = module, queue
        self.settings = () if isinstance(module, nn.Linear) else _settings(module)  # of the convolution
        self.number = _number(self)

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return type(self.module).forward(self.module, x)
        if torch.compiler.is_compiling():
            return self._compiled(x, weight, bias)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            # Casting x by hand lets autograd cast its gradient back, as autocast itself does.
            x = x.to(torch.get_autocast_dtype(kind))
        casts = self.queue.cast(weight, x.dtype), self.queue.cast(bias, x.dtype)
        return _Layer.apply(x, weight, bias, *casts, self)

    def _compiled(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Under torch.compile: operators that the compiler takes as they are (see the end of this file)."""
        if not x.requires_grad:
            # Without an input's gradient nothing would use the operator's backward, and the compiler would drop it.
            return type(self.module).forward(self.module, x)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return _compiled_layer(x, weight, bias, self.number)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the layer computes, from tensors that ask for no gradient."""
        if self.settings:
            return F.conv2d(x, weight, bias, *self.settings)
        if x.dim() == 2 or x.is_contiguous():
            return F.linear(x, weight, bias)
        # Of a strided x, torch makes one large product if a gradient is asked for, and a batch of small ones if not;
        # in half precision they differ in the last bit. So the large one is spelled out.
        y = x.reshape(-1, x.shape[-1]).mm(weight.t()).view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y.add_(bias)

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if self.settings:
            return _conv_backward(grad, x, weight, None, self.settings, (True, False, False))[0]
        return grad.reshape(-1, grad.shape[-1]).mm(weight).view_as(x)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        """The other half, added to the parameters' `.grad` in their own dtype."""
        bias = self.module.bias
        of_bias = bias is not None and bias.requires_grad
        if self.settings:
            sizes = [weight.shape[0]] if of_bias else None
            _, dw, db = _conv_backward(grad, x, weight, sizes, self.settings, (False, True, of_bias))
        else:
            grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            dw, db = grad.t().mm(x), grad.sum(0) if of_bias else None
        _accumulate(self.module.weight, dw)
        if of_bias:
            _accumulate(bias, db)


def _settings(conv: nn.Conv2d) -> tuple:
    return conv.stride, conv.padding, conv.dilation, conv.groups


def _conv_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, settings: tuple, mask: tuple):
    stride, padding, dilation, groups = settings
    return torch.ops.aten.convolution_backward(
        grad, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0], groups, mask
    )


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    """`parameter.grad += grad` as autograd does it: in the parameter's dtype and memory layout."""
    grad = grad.to(parameter.dtype)
    if parameter.grad is not None:
        parameter.grad.add_(grad)
    elif grad.stride() == parameter.stride():
        parameter.grad = grad
    else:
        parameter.grad = torch.empty_like(parameter).copy_(grad)


class _Layer(torch.autograd.Function):
    """Forward as always; backward gives x its gradient and queues the rest.

    The parameters are arguments only so that there is a backward at all where x needs none (conv_in); their own
    gradients are not returned but added later. What is computed with are `w` and `b`, cast if autocast is on.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, w, b, layer):
        ctx.layer = layer
        ctx.save_for_backward(x, w)
        return layer.run(x, w, b)

    @staticmethod
    def backward(ctx, grad):
        layer, (x, w) = ctx.layer, ctx.saved_tensors
        layer.queue.pending.append(lambda: layer.weight_gradient(grad, x, w))
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        if not torch.is_autocast_enabled(grad.device.type):
            return layer.input_gradient(grad, x, w), None, None, None, None, None
        # The dtypes were settled in forward; an autocast around the backward call must not change them.
        with torch.autocast(grad.device.type, enabled=False):
            return layer.input_gradient(grad, x, w), None, None, None, None, None


# ── the same for torch.compile ───────────────────────────────────────────────────────────────────────────────────────
# torch.compile cannot look into an autograd function that fills a list, so it gets two operators it need not look into.
# Operators take tensors and numbers only, hence a number for each layer. The queue must own what it keeps, because
# compiled code reuses the memory of its inputs: two copies a layer are the price.

_LAYERS: weakref.WeakValueDictionary[int, _Forward] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _number(layer: _Forward) -> int:
    number = next(_numbers)
    _LAYERS[number] = layer
    return number


@torch.library.custom_op("folded::layer", mutates_args=())
def _compiled_layer(x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return _LAYERS[number].run(x, weight, bias)


@_compiled_layer.register_fake
def _(x, weight, bias, number):
    return _LAYERS[number].run(x, weight, bias)


@torch.library.custom_op("folded::layer_backward", mutates_args=())
def _compiled_backward(grad: Tensor, x: Tensor, weight: Tensor, number: int) -> Tensor:
    layer = _LAYERS[number]
    kept = grad.clone(), x.clone(), weight
    layer.queue.pending.append(lambda: layer.weight_gradient(*kept))
    return layer.input_gradient(grad, x, weight)


@_compiled_backward.register_fake
def _(grad, x, weight, number):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    x, weight, _, ctx.number = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return _compiled_backward(grad.contiguous(), x, weight, ctx.number), None, None, None


_compiled_layer.register_autograd(_backward, setup_context=_save)
