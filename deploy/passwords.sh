#!/bin/sh
# passwords.sh [FILE]: adds a password for each user of the broker to the file that compose.yaml reads, `.env`.
# Does nothing if they are there.
set -eu
file=${1:-.env}
if grep -qs '^SHOAL_COMPOSE_GATEWAY_PASSWORD=' "$file"; then
    echo "$file has passwords already" >&2
    exit 0
fi
umask 077
for user in GATEWAY TOKENIZER SCHEDULER EXECUTOR DETOKENIZER OPERATOR; do
    # Letters and digits alone: they stand in an address and between quotes.
    printf 'SHOAL_COMPOSE_%s_PASSWORD=%s\n' "$user" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done >> "$file"
chmod 600 "$file"
