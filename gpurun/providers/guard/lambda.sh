# Run at every boot: ends a Lambda machine at its deadline, by the API alone, as one that powers itself off is billed on.
# BASE_URL, TOKEN, DEADLINE, LEASE_S and KEY_B64 stand above. None of this is an argument of a process, and the key is in
# no file but those in which cloud-init keeps, for root alone, what a machine was launched with.

key() { printf %s "$KEY_B64" | base64 -d; }

# The ids of what carries this machine's token, by name or by tag. What runs this, cloud-init, is Python too.
itself() {
    key | $limited python3 -I -c '
import json, sys, urllib.request

class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None

url, token = sys.argv[1:]
headers = {"Authorization": "Bearer " + sys.stdin.read().strip(), "User-Agent": "gpurun"}
answer = urllib.request.build_opener(Stay).open(urllib.request.Request(url, headers=headers), timeout=20)
for one in json.loads(answer.read().decode())["data"]:
    if token in [one.get("name")] + [tag.get("value") for tag in one.get("tags") or []]:
        print(one["id"])
' "$BASE_URL/instances" "$TOKEN"
}

# Each alone, as one that has ended may be refused; and slowly, as the account has one request a second.
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
