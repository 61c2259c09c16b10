# make test: the default tests. make check: what must pass before a change is merged. Both are CONTRIBUTING.md's.
.PHONY: test check
test:
	.venv/bin/python -m pytest
check:
	.ci/run
