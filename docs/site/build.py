"""Build the documentation's site with Sphinx; warnings are errors.

python docs/site/build.py FOLDER    writes FOLDER/html from generated FOLDER/source
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import pages
from sphinx.cmd.build import build_main


def main() -> int:
    """Write sources and site; return Sphinx's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    shutil.rmtree(folder / "source", ignore_errors=True)  # removes pages that no longer exist
    pages.write_sources(folder / "source")
    here = str(Path(__file__).parent)
    return build_main(["-q", "-W", "--keep-going", "-c", here, str(folder / "source"), str(folder / "html")])


if __name__ == "__main__":
    sys.exit(main())
