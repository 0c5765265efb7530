# Ends a Lambda machine at its deadline, with the key that lies beside this file. BASE_URL, INSTANCE, DEADLINE and LEASE_S
# stand above. It is disarmed by taking the key away.

here=$(cd "$(dirname "$0")" && pwd) || exit 1

key() { cat "$here/guard.key"; }
armed() { [ -f "$here/guard.key" ] || exit 0; }
terminate() { armed && ask POST "$BASE_URL/instance-operations/terminate" "{\"instance_ids\":[\"$INSTANCE\"]}"; }

end_in_time() {
    until due; do
        armed
        sleep "${GPURUN_GUARD_TICK_S:-5}"
    done
    insist terminate
}

begin "$here" "$DEADLINE" "$LEASE_S"
lasting end_in_time
