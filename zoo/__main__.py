"""`python -m zoo`: the same as the command `zoo`, also for torchrun (`torchrun -m zoo train ...`)."""

import sys

from zoo.cli.main import main

sys.exit(main())
