"""What the source documents call this file is `dualtune check-env`; their option --env is its --for.

python scripts/validate_environment.py --env=h100 [--json …]
"""

import sys

from dualtune.cli.main import main

if __name__ == "__main__":
    sys.argv[1:] = ["check-env", *("--for" + arg[5:] if arg[:5] == "--env" else arg for arg in sys.argv[1:])]
    main()
