# Decides when the time is over: at an absolute time, or a number of seconds after the first start, whichever is sooner.
# The seconds are counted by the kernel's uptime and kept on the disk, so neither a clock that is wrong or set back
# nor a restart adds any. An earlier time written into FOLDER/deadline shortens the time; nothing extends it.

# whole TEXT: print the text if it is a number with which a shell can calculate, else nothing.
whole() { case $1 in '' | *[!0-9]* | ?????????????*) ;; *) echo "$1" ;; esac; }

# earlier A B: print the smaller of two numbers; either may be missing.
earlier() {
    first=$(whole "$1") second=$(whole "$2")
    if [ -n "$first" ] && [ "$first" -le "${second:-$first}" ]; then echo "$first"; else echo "$second"; fi
}

uptime_s() { read -r up_s _ </proc/uptime && echo "${up_s%%.*}" || date +%s; }

# booted_s: print how many seconds ago a machine that was booted for this run only has booted.
booted_s() { read -r up_s _ <"${GPURUN_GUARD_UPTIME:-/proc/uptime}" && echo "${up_s%%.*}"; }

# set_right AGE_S: if by this clock the machine was requested more than half an hour before it booted, the clock is
# ahead, maybe by hours. Then set the deadline by that clock: what is left of the lease after AGE_S.
set_right() {
    age_s=$(whole "$1") now_s=$(date +%s)
    [ -n "$age_s" ] && [ -n "$deadline" ] && [ -n "$lease_s" ] || return 0
    [ $((now_s - deadline + lease_s)) -le $((age_s + 1800)) ] || deadline=$((now_s + lease_s - age_s))
}

# begin FOLDER DEADLINE LEASE_S [AGE_S]: read what an earlier start has left in the folder. Without a lease only the
# deadline counts. With an age, the first start corrects the deadline for all later ones.
begin() {
    folder=$1 deadline=$(whole "$2") lease_s=$(whole "$3") spent_s=0 seen_s=$(uptime_s)
    read -r boot </proc/sys/kernel/random/boot_id || boot=none
    [ "${lease_s:-0}" -gt 0 ] || lease_s=
    mkdir -p "$folder"
    if [ ! -f "$folder/spent" ] || ! read -r old_spent_s old_seen_s old_boot old_deadline <"$folder/spent"; then
        set_right "$4"
        return 0
    fi
    [ -z "$4" ] || [ -z "$(whole "$old_deadline")" ] || deadline=$old_deadline
    spent_s=$(whole "$old_spent_s") deadline=$(earlier "$deadline" "$old_deadline")
    spent_s=${spent_s:-0}
    [ "$old_boot" != "$boot" ] || seen_s=$(earlier "$seen_s" "$old_seen_s")
} 2>/dev/null

# due: whether the time is over. Without a deadline and without a lease it is over at once.
due() {
    now_s=$(uptime_s) wish=
    [ ! -f "$folder/deadline" ] || read -r wish <"$folder/deadline"
    deadline=$(earlier "$deadline" "$wish")
    [ "$now_s" -le "$seen_s" ] || spent_s=$((spent_s + now_s - seen_s))
    seen_s=$now_s
    echo "$spent_s $seen_s $boot $deadline" >"$folder/spent.new" && mv -f "$folder/spent.new" "$folder/spent"
    [ -n "$deadline$lease_s" ] || return 0
    [ -z "$lease_s" ] || [ "$spent_s" -lt "$lease_s" ] || return 0
    [ -n "$deadline" ] && [ "$(date +%s)" -ge "$deadline" ]
} 2>/dev/null

# wait_for_it: return when the time is over.
wait_for_it() { until due; do sleep "${GPURUN_GUARD_TICK_S:-5}"; done; }

# insist WAY...: try one way after the other, for ever. After a way that reports success, pause; if this still runs
# after the pause, the report was false, so try the next way.
insist() {
    while :; do
        for way in "$@"; do $way && sleep "${GPURUN_GUARD_PAUSE_S:-30}"; done
        sleep "${GPURUN_GUARD_PAUSE_S:-30}"
    done
}

# lasting PROGRAM: run it in a separate process until it ends with success, and again if it was killed or ended early,
# as a shell does that cannot start a new process. This shell survives that, because what `command` runs may fail.
lasting() {
    trap '' HUP INT TERM PIPE
    exec 3>&2 2>/dev/null
    while :; do command eval '{ command eval "$1"; exit; } 2>&3 & wait $! && exit 0; sleep 1'; done
}
