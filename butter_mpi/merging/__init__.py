"""Recordings of many ranks, merged: ``python -m butter_mpi.recorder FILE...`` names the first divergence.

``reading`` takes files for data that anybody may have written, ``comparing`` is pure, ``report`` is what people and
programs read.
"""
