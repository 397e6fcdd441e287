#!/bin/sh
# secrets.sh [NAMESPACE]: makes the Secrets that the manifests name, where they are not there yet, in `shoal` or another
# namespace: `broker`, a password for each of the broker's users, and `clients`, a first key for clients, of the tenant
# `default`. It prints no secret, and none is on a command line.
set -eu
namespace=${1:-shoal}
here=$(dirname "$0")
umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

is_there() { kubectl --namespace "$namespace" get secret "$1" > "$folder/answer" 2>&1 || {
    grep -q NotFound "$folder/answer" || { cat "$folder/answer" >&2; exit 1; }   # no answer is not a no
    return 1
}; }

make() { kubectl --namespace "$namespace" create secret generic "$1" --from-env-file="$folder/$1"; }

if ! is_there broker; then
    sh "$here/../passwords.sh" "$folder/passwords"
    sed 's/^SHOAL_COMPOSE_//; s/_PASSWORD=/=/' "$folder/passwords" | while IFS='=' read -r user password; do
        printf '%s=%s\n' "$(printf %s "$user" | tr '[:upper:]' '[:lower:]')" "$password"
    done > "$folder/broker"
    make broker
fi
if ! is_there clients; then
    printf 'api-keys=default:%s\n' "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')" > "$folder/clients"
    make clients
fi
