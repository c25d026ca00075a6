#!/bin/sh
# Install numpy 1.26.4 into the folder numpy1 of a virtual environment, beside the numpy 2 that it has: tests run
# Triton's interpreter with it (tests/helpers/interpreter.py), which is wrong with numpy 2 under Triton 3.1.
set -eu
"$1/bin/python" -m pip install --quiet --upgrade --no-deps --target "$1/numpy1" numpy==1.26.4
