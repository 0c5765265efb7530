# Run at every boot: arms the power-off, which AWS turns into the instance's end. DEADLINE and LEASE_S are set above.

end_in_time() {
    wait_for_it
    insist "systemctl poweroff" "shutdown -P now" "systemctl --force poweroff" "systemctl --force --force poweroff"
}

# A folder for this deadline only: the image may have been made from another run's machine, whose time is over.
begin "${GPURUN_GUARD_FOLDER:-/var/lib/gpurun}/$DEADLINE" "$DEADLINE" "$LEASE_S" "$(booted_s)"
lasting end_in_time </dev/null >/dev/null 2>&1 &

# A second timer, if the first is killed. In the background, because it may wait for the boot, which waits for this.
at="--timer-property=AccuracySec=1s"
[ "$deadline" -gt "$DEADLINE" ] || systemd-run --on-calendar="$CALENDAR" $at systemctl poweroff </dev/null >/dev/null 2>&1 &
[ -z "$lease_s" ] || systemd-run --on-active="$((lease_s - spent_s))" $at systemctl poweroff </dev/null >/dev/null 2>&1 &
