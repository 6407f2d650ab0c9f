"""`paddle.dataset.movielens`: a user, a film and the rating, as lists of ids; the rating in [-3, 5].

Ids of title words and categories follow the alphabet (in Fluid the order of a set). The files are read once.
Source: python/paddle/dataset/movielens.py (Fluid 1.8).
"""

from __future__ import annotations

import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.alias.dataset.common import download
from penstock.dataset.readers import Reader

__all__ = [
    "MovieInfo", "UserInfo", "age_table", "fetch", "get_movie_title_dict", "max_job_id", "max_movie_id", "max_user_id",
    "movie_categories", "movie_info", "test", "train", "user_info",
]  # fmt: skip

URL = "https://dataset.bj.bcebos.com/movielens%2Fml-1m.zip"
MD5 = "c4d9eecfca2ab87c1945afe126590906"
age_table = [1, 18, 25, 35, 45, 50, 56]
_YEAR = re.compile(r"\(\d+\)$")


@dataclass(frozen=True, slots=True)
class MovieInfo:
    """A film."""

    index: int
    categories: list[str]
    title: str

    def value(self) -> list[Any]:
        """Return its id, and the ids of its categories and of the words of its title."""
        categories, words = movie_categories(), get_movie_title_dict()
        return [self.index, [categories[c] for c in self.categories], [words[w.lower()] for w in self.title.split()]]


@dataclass(frozen=True, slots=True)
class UserInfo:
    """A user. `age`: an index of `age_table`."""

    index: int
    is_male: bool
    age: int
    job_id: int

    def value(self) -> list[int]:
        """Return the id, the gender (0: male), the age group and the job."""
        return [self.index, 0 if self.is_male else 1, self.age, self.job_id]


@dataclass(frozen=True, slots=True)
class _Tables:
    movies: dict[int, MovieInfo]
    users: dict[int, UserInfo]
    words: dict[str, int]
    categories: dict[str, int]


def train(rand_seed: int = 0, test_ratio: float = 0.1) -> Reader:
    """Return a reader of the training set: nine of ten ratings, chosen at random by the seed. Raises SpecError."""
    return _reader(rand_seed, test_ratio, is_test=False)


def test(rand_seed: int = 0, test_ratio: float = 0.1) -> Reader:
    """Return a reader of the other ratings. Raises SpecError."""
    return _reader(rand_seed, test_ratio, is_test=True)


def movie_info() -> dict[int, MovieInfo]:
    """Return the films by id. Raises SpecError."""
    return _tables().movies


def user_info() -> dict[int, UserInfo]:
    """Return the users by id. Raises SpecError."""
    return _tables().users


def get_movie_title_dict() -> dict[str, int]:
    """Return the ids of the words of titles, in lower case. Raises SpecError."""
    return _tables().words


def movie_categories() -> dict[str, int]:
    """Return the ids of categories. Raises SpecError."""
    return _tables().categories


def max_movie_id() -> int:
    """Return the largest id of a film. Raises SpecError."""
    return max(movie_info())


def max_user_id() -> int:
    """Return the largest id of a user. Raises SpecError."""
    return max(user_info())


def max_job_id() -> int:
    """Return the largest id of a job. Raises SpecError."""
    return max(user.job_id for user in user_info().values())


def fetch() -> None:
    """Check that the archive is there. Raises SpecError."""
    download(URL, "movielens", MD5)


def _tables() -> _Tables:
    return _read(download(URL, "movielens", MD5))


@cache
def _read(path: str) -> _Tables:
    movies = {}
    for number, title, categories in _rows(path, "movies.dat"):
        movies[int(number)] = MovieInfo(int(number), categories.split("|"), _YEAR.sub("", title))
    users = {}
    for number, gender, age, job, _ in _rows(path, "users.dat"):
        users[int(number)] = UserInfo(int(number), gender == "M", age_table.index(int(age)), int(job))
    words = sorted({word.lower() for movie in movies.values() for word in movie.title.split()})
    categories_ = sorted({category for movie in movies.values() for category in movie.categories})
    return _Tables(movies, users, *({name: i for i, name in enumerate(names)} for names in (words, categories_)))


def _rows(path: str, name: str) -> Iterator[list[str]]:
    with zipfile.ZipFile(path) as archive, archive.open(f"ml-1m/{name}") as file:
        for line in file:
            yield line.decode("latin-1").strip().split("::")


def _reader(seed: int, test_ratio: float, *, is_test: bool) -> Reader:
    tables, path = _tables(), download(URL, "movielens", MD5)

    def samples() -> Iterator[list[Any]]:
        chosen = random.Random(seed)
        for user, movie, rating, _ in _rows(path, "ratings.dat"):
            if (chosen.random() < test_ratio) == is_test:
                features = [*tables.users[int(user)].value(), *tables.movies[int(movie)].value()]
                yield [*features, [float(rating) * 2 - 5.0]]

    return samples
