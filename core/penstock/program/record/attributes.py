"""Attributes of variables that scripts read and set: how a parameter is named, initialised and trained; kinds."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

from penstock.errors import ArgumentError, ProgramError
from penstock.program.initializers import Initializer
from penstock.program.record.recording import Recording
from penstock.program.record.source import user_line


class ParamAttr:
    """How a parameter is named, initialised and trained. `learning_rate`: factor on the optimizer's."""

    def __init__(
        self,
        name: str | None = None,
        initializer: Initializer | None = None,
        learning_rate: float = 1.0,
        regularizer: Any = None,
        trainable: bool = True,
        gradient_clip: Any = None,
        do_model_average: bool = True,
    ) -> None:
        self.name = name
        self.initializer = initializer
        self.learning_rate = float(learning_rate)
        self.regularizer = regularizer
        self.trainable = trainable
        self.gradient_clip = gradient_clip
        self.do_model_average = do_model_average

    @staticmethod
    def of(attr: Any) -> ParamAttr | None:
        """Return what Fluid accepts as a ParamAttr: None, a name, an initialiser, or False for no parameter."""
        if attr is None or attr is True:
            return ParamAttr()
        if attr is False:
            return None
        if isinstance(attr, ParamAttr):
            return attr
        if isinstance(attr, str):
            return ParamAttr(name=attr)
        if hasattr(attr, "operator"):
            return ParamAttr(initializer=attr)
        raise ArgumentError(
            f"{user_line()}: a parameter attribute is {attr!r}; expected None, False, a name, an initialiser or "
            "ParamAttr"
        )

    @staticmethod
    def _to_attr(arg: Any) -> Any:
        """Return `of(arg)` under Fluid's private name, which libraries use: False for no parameter, and lists."""
        if isinstance(arg, (list, tuple)):
            return [ParamAttr._to_attr(one) for one in arg]
        return ParamAttr.of(arg) or False


def attributes_of(recording: Recording, name: str) -> ParamAttr:
    """Return how a parameter is trained; the default, to be changed, for one that was captured from a module."""
    found = recording.attributes.setdefault(name, ParamAttr())
    assert isinstance(found, ParamAttr)
    return found


class Rates(UserDict[str, float]):
    """`optimize_attr` of a parameter: {"learning_rate": factor}. What is put in is the parameter's from then on."""

    def __init__(self, attribute: ParamAttr) -> None:
        super().__init__()
        self.data["learning_rate"] = attribute.learning_rate
        self._attribute = attribute

    def __setitem__(self, key: str, item: float) -> None:
        if key != "learning_rate":
            raise ProgramError(f"{user_line()}: optimize_attr has no {key!r}; expected 'learning_rate'")
        super().__setitem__(key, float(item))
        self._attribute.learning_rate = float(item)


class Kind(str):
    """A kind of variable as text, which Fluid's `type` is, that is called as torch's `type`."""

    _cast: Callable[[Any], Any]

    def __new__(cls, kind: str, cast: Callable[[Any], Any]) -> Kind:
        """Make the text."""
        made = super().__new__(cls, kind)
        made._cast = cast
        return made

    def __call__(self, *dtype: Any) -> Any:
        """Return the variable as another dtype; without one, torch's name of its own."""
        return self._cast(*dtype)
