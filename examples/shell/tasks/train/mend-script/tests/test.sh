#!/bin/bash
# Two parts of the reward: one name of a single word, one with a blank.
word() { [ "$(./greet "$1" 2>/dev/null)" = "Hello, $1!" ] && echo 1 || echo 0; }
single=$(word Ada) blank=$(word "Ada Lovelace")
reward=$(awk "BEGIN { print ($single + $blank) / 2 }")
echo "{\"reward\": $reward, \"single\": $single, \"blank\": $blank}" > /logs/verifier/reward.json
