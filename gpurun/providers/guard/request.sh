# Sends one HTTP request with a key, by a tool that this machine has. The key is what `key` prints, and is never
# an argument, because every user of a machine can read those.

limited=$(command -v timeout >/dev/null && echo timeout 40)

# ask METHOD URL [BODY]: whether the answer was 2xx. Another tool is tried only if one got no answer at all.
ask() {
    for tool in curl python3 wget; do
        command -v "$tool" >/dev/null || continue
        status=$("with_$tool" "$@")
        case $status in 2??) return 0 ;; [345]??) break ;; esac
    done
    echo "gpurun: $1 $2 was answered ${status:-nothing}" >&2
    return 1
}

with_curl() {
    printf 'header = "Authorization: Bearer %s"\nheader = "Content-Type: application/json"\n' "$(key)" |
        $limited curl -q -sS -A gpurun --max-time 20 -o /dev/null -w '%{http_code}' -X "$1" ${3:+--data-raw "$3"} --config - "$2"
}

with_python3() {
    key | $limited python3 -I -c '
import sys, urllib.error, urllib.request

class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None

method, url, body = sys.argv[1:]
headers = {"Content-Type": "application/json", "User-Agent": "gpurun"}
headers["Authorization"] = "Bearer " + sys.stdin.read().strip()
request = urllib.request.Request(url, body.encode() or None, headers, method=method)
try:
    print(urllib.request.build_opener(Stay).open(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
' "$1" "$2" "${3-}"
}

# Only GNU wget: others accept a header only as an argument. GNU wget reads its settings only from a file.
with_wget() {
    rc=$folder/wgetrc
    (umask 077 && printf 'header = Authorization: Bearer %s\nheader = Content-Type: application/json\n' "$(key)" >"$rc")
    $limited wget -q --config="$rc" -U gpurun --tries=1 --timeout=20 --max-redirect=0 -O /dev/null \
        --method="$1" ${3:+--body-data="$3"} "$2"
    case $? in 0) echo 200 ;; 8) echo 500 ;; esac
    rm -f "$rc"
}
