"""Runs pytest on the files given: the entry point of the Bazel test targets."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
