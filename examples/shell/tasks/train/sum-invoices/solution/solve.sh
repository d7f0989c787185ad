#!/bin/bash
cat invoices/*.csv | awk -F, '$1 == "Norvel" { sum += $2 } END { print sum }' > total.txt
