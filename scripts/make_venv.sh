#!/bin/sh
# Make a virtual environment with the first Python 3.11-3.14 on the PATH (or $PYTHON).
set -eu
target=$1
for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
        "$python" -m venv "$target" || {
            echo "error: $python cannot make a virtual environment; expected its venv module;" \
                "on Debian or Ubuntu: apt-get install python3-venv" >&2
            exit 1
        }
        exit 0
    fi
done
echo "error: got no Python 3.11 to 3.14 on the PATH; expected one; install it or set PYTHON=/path/to/python" >&2
exit 1
