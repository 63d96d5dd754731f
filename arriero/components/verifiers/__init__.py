"""Verifiers: what a response is worth, found out where it can do no harm.

reward (config, `score`) -> run -> scorer: this process, or a pool of killable workers -> Score
"""
