#!/bin/bash
find . -type f | sort > /tmp/found
printf '%s\n' ./backups/access.bak ./backups/start.bak ./backups/stop.bak ./db/old/bak.txt ./web/index.html > /tmp/wanted
cmp -s /tmp/found /tmp/wanted && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
