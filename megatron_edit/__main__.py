"""``python -m megatron_edit``: see `megatron_edit.launcher`."""

import sys

from megatron_edit.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
