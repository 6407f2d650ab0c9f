"""How long torch's idle threads spin: set as Penstock is imported, because libgomp reads it once, when torch loads it.

By default a thread of libgomp spins 300 000 times before it sleeps, which takes milliseconds, after each operator and
at each barrier within one. Where other processes want the cores, threads spin that wait for one that has none: on two
cores with seven busy processes, steps of 0.8 ms took 200 ms. 1000 is libgomp's own count for more threads than cores,
enough to stay awake from one operator of a step to the next.

`OMP_WAIT_POLICY` and `GOMP_SPINCOUNT` of the environment win. There is no effect on a process that imports torch before
Penstock, nor where torch's OpenMP is another one.
Source: https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
"""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = "1000"


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Set how often a thread of libgomp looks for work before it sleeps, unless `environ` says how threads wait.

    A value that was inherited from a process that imported Penstock gives way to a policy, over which it would win.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)
    elif environ.get("GOMP_SPINCOUNT") == SPINS:
        del environ["GOMP_SPINCOUNT"]
