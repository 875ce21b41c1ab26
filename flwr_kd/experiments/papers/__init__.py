"""The papers' tables and figures as data: what each was made with, what it printed, and what it claims.

A method's folder has one TOML file for each table or figure in ``experiments/``, and ``paper.toml`` for what holds
for the whole paper. :mod:`.schema` is their form, :mod:`.library` finds them, :mod:`.expectations` decides whether
a claim holds, and :mod:`.reproduction` runs them.
"""
