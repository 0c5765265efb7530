# Run at every boot: ends a Lambda machine at its deadline, only by the API, because Lambda bills a machine that is off.
# BASE_URL, TOKEN, DEADLINE, LEASE_S and KEY_B64 are set above. None of them is an argument of a process, and the key is
# only in the files in which cloud-init keeps, readable by root alone, what a machine was launched with.

key() { printf %s "$KEY_B64" | base64 -d; }

# Print the ids of the machines with this machine's token as name or tag. cloud-init, which runs this, is Python too.
itself() {
    key | $limited python3 -I -c '
import json, sys, urllib.request

class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None

url, token = sys.argv[1:]
headers = {"Authorization": "Bearer " + sys.stdin.read().strip(), "User-Agent": "gpurun"}
answer = urllib.request.build_opener(Stay).open(urllib.request.Request(url, headers=headers), timeout=20)
for machine in json.loads(answer.read().decode())["data"]:
    if token in [machine.get("name")] + [tag.get("value") for tag in machine.get("tags") or []]:
        print(machine["id"])
' "$BASE_URL/instances" "$TOKEN"
}

# One request for each, because Lambda may refuse one that has ended; and slowly: an account has one request a second.
terminate() {
    for id in $(itself); do
        sleep "${GPURUN_GUARD_TICK_S:-5}"
        ask POST "$BASE_URL/instance-operations/terminate" "{\"instance_ids\":[\"$id\"]}"
    done
}

end_in_time() {
    wait_for_it
    insist terminate
}

begin "${GPURUN_GUARD_FOLDER:-/var/lib/gpurun}" "$DEADLINE" "$LEASE_S" "$(booted_s)"
lasting end_in_time </dev/null >/dev/null 2>&1 &
