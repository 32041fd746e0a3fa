"""``python -m gradrewrite``."""

import sys

from gradrewrite.cli import main

sys.exit(main())
