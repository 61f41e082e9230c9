"""What the launchers of planned chains on a GPU share: checks of their tensors, and memory for the gradients."""

from torch import Tensor

from nasfast.ops.destinations import new_image, new_parameter_gradient
from nasfast.ops.plan import ChainPlan, Kind


def check_forward(
    chain: ChainPlan, x: Tensor, residual: Tensor | None, weights: list[list[Tensor]], *, add_input: bool
) -> None:
    """Refuse tensors that are not those of the plan, because the kernels would read and write beyond their ends.

    Args:
        weights: of the convolutions, then weights and biases of the BatchNorms.

    Raises:
        ValueError: a shape is not that of the plan.
    """
    _check(chain, "x", x, weights, add_input=add_input)
    if residual is not None and residual.shape != chain.out_shape:
        raise ValueError(
            f"conv_bn_act_chain: this plan needs residual of shape {chain.out_shape}, got {residual.shape}"
        )


def check_backward(
    chain: ChainPlan, grad: Tensor, saved: Tensor, weights: list[list[Tensor]], saved_size: int, *, add_input: bool
) -> None:
    """The same for backward; saved_size: elements that forward has kept.

    Raises:
        ValueError: a shape is not that of the plan, or `saved` does not have its size.
    """
    _check(chain, "grad", grad, weights, add_input=add_input)
    if saved.numel() != saved_size:
        raise ValueError(f"conv_bn_act_chain: this plan saves {saved_size} elements, got {saved.numel()}")


def _check(chain: ChainPlan, name: str, image: Tensor, weights: list[list[Tensor]], *, add_input: bool) -> None:
    shape = chain.in_shape if name == "x" else chain.out_shape
    if image.shape != shape or add_input and (chain.shuffle or chain.in_shape != chain.out_shape):
        raise ValueError(
            f"conv_bn_act_chain: this plan needs {name} of shape {shape}, and adds x only to a result of its shape; "
            f"got {tuple(image.shape)}, add_input={add_input}"
        )
    for i, (stage, conv, *norm) in enumerate(zip(chain.stages, *weights, strict=True)):
        per_group = 1 if stage.kind == Kind.DEPTHWISE else stage.in_channels
        weight = stage.out_channels, per_group, stage.kernel, stage.kernel
        if conv.shape != weight or any(vector.shape != (stage.out_channels,) for vector in norm):
            raise ValueError(
                f"conv_bn_act_chain, stage {i}: this plan needs conv_weight of shape {weight}, and a BatchNorm of "
                f"{stage.out_channels} channels; got {tuple(conv.shape)} and {[tuple(v.shape) for v in norm]}"
            )


def new_gradients(
    chain: ChainPlan, saved: Tensor, bn_weights: list[Tensor], bn_biases: list[Tensor], wants: list[bool]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Memory for dx, dweights and dbiases; empty where a gradient is not wanted. wants: see csrc/library.cpp."""
    dx = new_image("input_gradient", chain.in_shape, saved) if wants[0] else saved.new_empty(0)
    dweights = [new_parameter_gradient(w, wanted=want) for w, want in zip(bn_weights, wants[1::2], strict=True)]
    dbiases = [new_parameter_gradient(b, wanted=want) for b, want in zip(bn_biases, wants[2::2], strict=True)]
    return dx, dweights, dbiases
