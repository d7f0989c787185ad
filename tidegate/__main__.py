"""`python -m tidegate` is the console script `tidegate`."""

import sys

from tidegate.cli import main

sys.exit(main())
