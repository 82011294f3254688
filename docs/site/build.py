"""Builds the documentation's site with Sphinx; warnings are errors.

python docs/site/build.py FOLDER    writes FOLDER/html, from sources that it puts into FOLDER/source
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import pages
from sphinx.cmd.build import build_main


def main() -> int:
    """Write sources and site; the exit code is Sphinx's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    shutil.rmtree(folder / "source", ignore_errors=True)  # or a page that is gone would stay on the site
    pages.write(folder / "source")
    here = str(Path(__file__).parent)
    return build_main(["-q", "-W", "--keep-going", "-c", here, str(folder / "source"), str(folder / "html")])


if __name__ == "__main__":
    sys.exit(main())
