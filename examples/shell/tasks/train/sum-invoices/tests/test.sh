#!/bin/bash
if [ "$(tr -d '[:space:]' < total.txt)" = 165 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
