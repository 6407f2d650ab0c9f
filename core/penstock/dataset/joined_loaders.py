"""Several loaders of one program: a run takes a batch from each of them that was started, or waits for its pushes.

Loaders are joined where they feed different inputs; one for inputs that an earlier one feeds takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.errors import FeedError

Feed = dict[str, Any]


class ProgramLoader(Protocol):
    """What a program reads from. `names`: of the inputs that it feeds; None: whatever its data set has."""

    @property
    def names(self) -> frozenset[str] | None: ...
    @property
    def is_started(self) -> bool: ...
    def next_feed(self, given: Any) -> Feed: ...
    def next_feeds(self, given: Any, num_replicas: int) -> Any: ...
    def used(self) -> None: ...


def joined(known: Any, loader: ProgramLoader) -> Any:
    """Return what a program reads from that has the loaders `known`, or None, and gets another one."""
    before = known.loaders if isinstance(known, JoinedLoaders) else [] if known is None else [known]
    kept = [one for one in before if _apart(one.names, loader.names)]
    return JoinedLoaders([*kept, loader]) if kept else loader


def _apart(these: frozenset[str] | None, those: frozenset[str] | None) -> bool:
    return these is not None and those is not None and these.isdisjoint(those)


class JoinedLoaders:
    """Two or more loaders, which feed different inputs."""

    def __init__(self, loaders: Sequence[ProgramLoader]) -> None:
        self.loaders = list(loaders)

    @property
    def is_started(self) -> bool:
        """Whether one was started; the others have to be, too, unless a run is fed their inputs."""
        return any(loader.is_started for loader in self.loaders)

    def next_feed(self, given: Any) -> Feed:
        """Return the next batch of each beside what a run was given. Raises EOFException, FeedError, SpecError."""
        asked = self._asked(given)
        rest = beside({name: None for loader in asked for name in loader.names or ()}, given)
        feed: Feed = {}
        for loader in asked:
            feed |= loader.next_feed(None)
        return {**feed, **rest}

    def next_feeds(self, given: Any, num_replicas: int) -> Any:
        """Return a feed for each replica. Raises as `next_feed`, and FeedError for another number from each loader."""
        if num_replicas == 1:
            return self.next_feed(given)
        parts = [loader.next_feeds(None, num_replicas) for loader in self._asked(given[0] if given else None)]
        counts = sorted({len(part) for part in parts})
        if len(counts) > 1:
            raise FeedError(
                f"the program's readers have {' and '.join(map(str, counts))} batches left for {num_replicas} "
                "replicas; let all have as many, or make them with drop_last=True"
            )
        feeds = [{name: value for feed in own for name, value in feed.items()} for own in zip(*parts, strict=True)]
        return [{**feed, **beside(feed, share_of(given, i))} for i, feed in enumerate(feeds)]

    def used(self) -> None:
        """Note that a run has ended on what was given last."""
        for loader in self.loaders:
            loader.used()

    def _asked(self, given: Any) -> list[ProgramLoader]:
        """All but those that were not started and whose inputs are fed. First those that may refuse."""
        fed = given.keys() if isinstance(given, Mapping) else frozenset[str]()
        asked = [one for one in self.loaders if one.is_started or not (one.names or frozenset()) & fed]
        return sorted(asked, key=lambda one: one.is_started)


def beside(feed: Feed, given: Any) -> Mapping[str, Any]:
    """Return what is fed beside the batch of a loader. Raises FeedError for what both have."""
    if not given:
        return {}
    if not isinstance(given, Mapping):
        raise FeedError("the program reads from a DataLoader; feed one dict of its other inputs, or nothing")
    both = sorted(feed.keys() & given.keys())
    if both:
        raise FeedError(f"{both[0]!r} is fed, and read from the program's DataLoader, too", variable=both[0])
    return given


def share_of(given: Any, replica: int) -> Any:
    """Return what a replica is fed beside its batch: of a list its own dict."""
    if given and isinstance(given, Mapping):
        raise FeedError(
            f"{sorted(given)[0]!r} is fed beside a reader that gives each replica a batch: feed a list of dicts, one "
            "for each replica",
            variable=sorted(given)[0],
        )
    return given[replica] if given else None
