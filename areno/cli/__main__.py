"""python -m areno.cli does what the command areno does."""

import sys

from areno.cli.main import main

sys.exit(main())
