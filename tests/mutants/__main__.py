"""Writes docs/mutants.md again."""

from mutants import TABLE, table

TABLE.write_text(table(), encoding="utf-8")
