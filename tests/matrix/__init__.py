"""The fault matrix: every fault in every phase on every plane under every launcher, run and judged.

``table`` says what there is and what must come, ``choosing`` which cells are run, ``running`` runs one (``scene`` and
``calm`` are what its ranks run), ``judging`` says what it was worth, ``reporting`` writes it down.
"""
