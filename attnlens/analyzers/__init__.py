"""Analyzers: functions that answer a question about a head by measures and curves.

Contents: `registry` (the decorators `analyzer` and `gathering`, MeasureInfo, selection of analyzers by name and
source), `symmetry`, `spectrum`, `selection`, `ksvd`, and `extra` (three short analyzers that run only on request).
Inputs: a `records.QueryKey` (queries and keys of all heads at one site); analyzers registered with `gathering` receive
the QueryKeys of many sequences.
Outputs: tensors by measure name, (..., heads) or (..., heads, steps); NaN for a missing value.
Importers: `requests`, `report`, `checks`, `runs`, `lab` and `cli`. Nothing here loads torch before an analyzer runs.

Importing the package registers the analyzers of all its modules. To add an analyzer, add a module to this package.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
