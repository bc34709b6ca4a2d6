"""python -m attention_ref: the `attention-ref` command."""
from .conformance.cli import main

raise SystemExit(main())
