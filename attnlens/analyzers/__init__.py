"""Analyzers: functions that answer a question about each head with measures and curves.

- `registry`: the decorators `analyzer` and `gathering`, MeasureInfo, and look-up of analyzers by name and source.
- `symmetry`, `spectrum`, `selection`, `ksvd`: one analyzer each, with the name of its module.
- `extra`: three short analyzers that run only on request.

The input is a `records.QueryKey` (queries and keys of all heads at one site), or the QueryKeys of many sequences for
analyzers registered with `gathering`. The outputs are tensors keyed by measure name, of shape (..., heads) or
(..., heads, steps), with NaN for a missing value. Importers: `requests`, `report`, `checks`, `runs`, `lab` and `cli`.
The package does not load torch before an analyzer runs.

Importing the package registers the analyzers of all its modules. To add an analyzer, add a module to this package.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
