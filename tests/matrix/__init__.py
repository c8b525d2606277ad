"""The fault matrix: faults, phases, planes, launchers (of one host and of several) and recoveries, run and judged.

``table`` says what there is, ``cells`` what goes together, ``expected`` what must come, ``choosing`` which cells are
run, ``running`` runs one (``scene``, ``back`` and ``calm`` are what its ranks run, ``outside`` strikes whole hosts),
``judging`` says what it was worth, ``reporting`` writes it down.
"""
