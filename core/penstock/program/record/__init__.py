"""The recorder: builds a Program from torch calls on symbolic tensors.

A `Variable` enters through `__torch_function__` (functions), the module door (`nn.Module.__call__`) or a
layer. Torch then runs on fake tensors with symbolic sizes under `RecordMode`, which appends one Operator
for each ATen call; `CompositeMode` keeps dropout, sparse embedding and attention dropout whole.

    context.py     current programs, roles, name scopes        variable.py    the user's handle
    recording.py   one Program's fake world: names, storages   dispatch.py    RecordMode: ATen call -> Operator
    symbols.py     sizes -> Expr, guards                        composite.py   CompositeMode
    fakes.py       tensors without values                      sizes.py       what torch sees of a size
    shapes.py      shapes of calls, at concrete batches        fitting.py     values at batches -> a size
    arithmetic.py  sizes in canonical form
    entry_points.py  modules and factories                      source.py      the user's file:line
    patches.py     what torch's names are while recording
    savepoint.py   undoes a call that failed
"""
