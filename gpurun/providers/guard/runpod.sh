# The first program of a pod: arms the pod's end, installs its host key, then becomes what the image starts ("$0" "$@").

api=${GPURUN_API_URL:-https://api.runpod.io}
pod=${RUNPOD_POD_ID:-${RUNPOD_POD_HOSTNAME%%-*}}

key() { printf %s "$RUNPOD_API_KEY"; }
delete() { ask DELETE "$api/v2/pods/$pod"; }
action() { ask POST "$api/v2/pods/$pod/action" "{\"action\":\"$1\"}"; }
graphql() { ask POST "$api/graphql" "{\"query\":\"mutation { podTerminate(input: {podId: \\\"$pod\\\"}) }\"}"; }
runpodctl_delete() { command -v runpodctl >/dev/null && $limited runpodctl pod delete "$pod"; }
runpodctl_remove() { command -v runpodctl >/dev/null && $limited runpodctl remove pod "$pod"; }

# "stop" is the last resort, because RunPod still bills the disk of a stopped pod.
end_pod() {
    echo "gpurun: the time of this pod is over; it deletes itself" >&2
    insist delete "action terminate" graphql runpodctl_delete runpodctl_remove "action stop"
}

# The image's own start keeps an existing host key. If it cannot be written here, gpurun notices that when it logs in.
install_host_key() {
    [ -n "$GPURUN_HOST_KEY_B64" ] || return 0
    file=${GPURUN_GUARD_SSH_FOLDER:-/etc/ssh}/ssh_host_ed25519_key
    mkdir -p "${file%/*}"
    (umask 077 && printf %s "$GPURUN_HOST_KEY_B64" | base64 -d >"$file.new") && mv -f "$file.new" "$file"
    ssh-keygen -y -f "$file" </dev/null >"$file.pub"
}

begin "${GPURUN_GUARD_FOLDER:-/var/lib/gpurun}" "$GPURUN_DEADLINE" "$GPURUN_LEASE_S"
# Not in the background: a start that fails again and again would end this before it has sent a request.
due && end_pod
end_in_time() { wait_for_it && end_pod; }
lasting end_in_time &
install_host_key
unset GPURUN_HOST_KEY_B64 RUNPOD_API_KEY
command -v "$0" >/dev/null && exec "$0" "$@"
echo "gpurun: this image has no $0 to start" >&2
wait
