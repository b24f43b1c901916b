"""Packages of environments, such as reasoning_gym: their rows, agents and rewards.

A setting names an environment as SCHEME:NAME. areno/environments/packages.py lists the schemes.
"""
