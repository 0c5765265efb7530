# Run at every boot: arms the power-off that AWS turns into the end of the instance. DEADLINE and LEASE_S stand above.

end_in_time() {
    wait_for_it
    insist "systemctl poweroff" "shutdown -P now" "systemctl --force poweroff" "systemctl --force --force poweroff"
}

# In a folder of its own: the image may have been made of another run's machine, whose time is over.
begin "${GPURUN_GUARD_FOLDER:-/var/lib/gpurun}/$DEADLINE" "$DEADLINE" "$LEASE_S" "$(booted_s)"
lasting end_in_time </dev/null >/dev/null 2>&1 &

# A second hand, in case somebody kills the first. In the background, as it may wait for the boot that waits for this.
at="--timer-property=AccuracySec=1s"
[ "$deadline" -gt "$DEADLINE" ] || systemd-run --on-calendar="$CALENDAR" $at systemctl poweroff </dev/null >/dev/null 2>&1 &
[ -z "$lease_s" ] || systemd-run --on-active="$((lease_s - spent_s))" $at systemctl poweroff </dev/null >/dev/null 2>&1 &
