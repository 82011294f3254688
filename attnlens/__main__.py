"""How is attnlens run as `python -m attnlens`?"""

from attnlens.cli import main

main()
