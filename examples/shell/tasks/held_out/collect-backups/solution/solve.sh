#!/bin/bash
mkdir backups && find web db -name '*.bak' -exec mv {} backups/ ';'
