"""The exception tree of Penstock. A class answers one question: *which side must act?*

    PenstockError
    ├── UserError            the person who wrote the program, the job or the command
    │   ├── ProgramError     a Program that cannot be recorded, built or read
    │   │   ├── ArgumentError  an argument of another type than it has to be
    │   │   └── RecordError  a call that torch refuses
    │   ├── FeedError        what was fed does not fit the Program
    │   ├── FetchError       what was fetched is not in the Program
    │   ├── OperatorError    an operator failed while it ran
    │   ├── EOFException     a program's reader has no more data: the loop over it ends
    │   ├── ReaderError      the generator behind a program's reader has failed
    │   └── SpecError        a job description, setting or argument
    ├── PeerError            the other side of a connection broke the contract
    ├── Unavailable          a temporary fault; a retry may help
    └── Bug                  an invariant of Penstock does not hold: report it

Fields are data; `str()` composes them; every error pickles; `code` is for machines.
The mapping of classes to HTTP statuses stands once, in `penstock_server.problems`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose.

    Keyword fields become attributes and travel through pickling.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))


def _rebuild(cls: type[PenstockError], message: str, fields: dict[str, Any]) -> PenstockError:
    return cls(message, **fields)


class UserError(PenstockError):
    """The user's program, job or command has to change."""

    code = "user_error"


class ProgramError(UserError, ValueError):
    """A Program cannot be recorded, built, checked or parsed. Fields: operator, variable, source.

    A ValueError, which is what Fluid raises, and scripts catch, of a name that a block does not have.
    """

    code = "program_error"


class ArgumentError(ProgramError, TypeError):
    """A layer, or what runs a program, is given an argument of another type than it takes. Fields: variable."""

    code = "argument_error"


class RecordError(ProgramError, RuntimeError):
    """Torch refuses a call that is being recorded. Fields: operator, source, shapes."""

    code = "record_error"


class FeedError(UserError, ValueError):
    """A feed does not fit. Fields: variable, got, expected."""

    code = "feed_error"


class FetchError(UserError, KeyError):
    """A fetch is not in the Program. Fields: variable."""

    code = "fetch_error"

    def __str__(self) -> str:  # KeyError would print the repr
        return self.message


class OperatorError(UserError, RuntimeError):
    """An operator failed while it ran. Fields: operator, source, shapes, replica."""

    code = "operator_error"


class EOFException(UserError, EOFError):
    """The reader of a program has no more data (`fluid.core.EOFException`): call its reset()."""

    code = "end_of_data"


class ReaderError(UserError):
    """The generator of a DataLoader or PyReader has raised an error, which is the cause of this one."""

    code = "reader_error"


class SpecError(UserError, ValueError):
    """A job description, a setting or an argument is wrong. Fields: pointer, got, expected."""

    code = "spec_error"


class PeerError(PenstockError):
    """The other side of a connection sent what the protocol does not allow."""

    code = "peer_error"


class Unavailable(PenstockError):
    """A peer or a resource is unavailable for now; a retry may help."""

    code = "unavailable"


class Bug(PenstockError):
    """An invariant of Penstock does not hold. The text asks for a report."""

    code = "bug"
