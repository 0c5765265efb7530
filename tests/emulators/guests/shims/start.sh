#!/bin/sh
# Does what RunPod's official images do at start: starts sshd if there is a key, then waits until the pod ends.
hook() { if [ -f "$GUEST_ROOT/$1" ]; then bash "$GUEST_ROOT/$1"; fi; }

hook pre_start.sh
echo "Pod Started"
if [ -n "$PUBLIC_KEY" ]; then
    echo "Setting up SSH..."
    mkdir -p ~/.ssh
    echo "$PUBLIC_KEY" >>~/.ssh/authorized_keys
    chmod 700 ~/.ssh
    chmod 600 ~/.ssh/authorized_keys
    for kind in ecdsa ed25519; do # Making an RSA key takes too long for a test.
        file=$GUEST_ROOT/etc/ssh/ssh_host_${kind}_key
        [ -f "$file" ] || ssh-keygen -t $kind -f "$file" -q -N ''
    done
    guest-sshd &
    echo "SSH host keys:"
    for file in "$GUEST_ROOT"/etc/ssh/*.pub; do
        echo "Key: $file"
        ssh-keygen -lf "$file"
    done
fi
env | grep -E '^(RUNPOD_[A-Za-z0-9_]*|PATH|_)=' | sed 's/=\(.*\)$/="\1"/; s/^/export /' >"$GUEST_ROOT/etc/rp_environment"
hook post_start.sh
echo "Start script(s) finished, Pod is ready to use."
exec sleep infinity
