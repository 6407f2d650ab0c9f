"""Which operators compute in half precision, by Fluid's types: fp16_lists.py (Fluid 1.8)."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import SpecError

WHITE = frozenset({"conv2d", "matmul", "mul"})
BLACK = frozenset(
    {
        "exp", "square", "log", "mean", "sum", "cos_sim", "softmax", "softmax_with_cross_entropy",
        "sigmoid_cross_entropy_with_logits", "cross_entropy", "cross_entropy2",
    }
)  # fmt: skip
GRAY = frozenset(
    {
        "elementwise_add", "elementwise_sub", "elementwise_mul", "elementwise_div", "elementwise_max",
        "elementwise_min", "elementwise_pow", "elementwise_mod", "elementwise_floordiv", "batch_norm", "tanh",
        "sigmoid", "lookup_table", "top_k", "pool2d", "pool3d", "dropout", "relu", "relu6", "leaky_relu", "soft_relu",
        "flatten2", "stack", "unstack", "uniform_random_batch_size_like", "gaussian_random",
        "gaussian_random_batch_size_like", "slice", "rank", "scale", "transpose2", "reshape2", "gather",
        "fill_constant", "get_tensor_from_selected_rows", "sign", "cast",
    }
)  # fmt: skip


class AutoMixedPrecisionLists:
    """White operators compute in half precision, all others in float32, gray ones too: what Fluid lets follow.

    `custom_white_list`, `custom_black_list`: Fluid's types that are moved there. `custom_black_varnames`: an operator
    that reads or makes one of these variables is left as it is. Raises SpecError for a type in both lists.
    """

    def __init__(
        self,
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        custom_black_varnames: Iterable[str] | None = None,
    ) -> None:
        white, black = set(custom_white_list or ()), set(custom_black_list or ())
        if white & black:
            raise SpecError(
                f"AutoMixedPrecisionLists: {', '.join(sorted(white & black))} in custom_white_list and in "
                "custom_black_list; expected each in one of them"
            )
        self.white_list = (set(WHITE) | white) - black
        self.black_list = (set(BLACK) | black) - white
        self.gray_list = set(GRAY) - white - black
        self.black_varnames = set(custom_black_varnames or ())


__all__ = ["AutoMixedPrecisionLists"]
