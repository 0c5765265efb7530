#!/bin/sh
# The job's first program: it runs each call that gpurun puts into calls/, so all of the run's processes are its
# children, and Slurm ends them with it. A call is a folder: NAME.go has its command and its input, NAME.done its outputs
# and its exit code. While nothing trains, it ends when no call came for a while: it holds no node for a lost laptop, and
# FOLDER has what was trained.
# With IMAGE, the job's own command runs in that image, by the script in-image; pilot and agent stay outside.
# On a cluster with bash its first line is `#!/bin/bash -l`, because `module` and conda are functions of a login shell.
# With "nodes" it runs a command on each of the job's nodes at once, which finds the leader in torchrun's variables.
# With "each" it may be any command: a stop reaches it as a signal on all nodes, and it finds MASTER_ADDR and NODE_RANK
# as well.
# Of several jobs of one sbatch, the first does all that. Each other job writes hands/K, which means that steps can be
# started in it (remote/agent/runner/hands.py), until the first job's work, or its time, is over.
# usage: pilot.sh FOLDER TENTHS-OF-A-SECOND SETUP IMAGE SECONDS
#        pilot.sh nodes PYTHON WORDS
#        pilot.sh each PYTHON COMMAND
umask 077
if [ "$1" = nodes ] || [ "$1" = each ]; then
    kind=$1
    shift
    . "$(dirname -- "$0")/job.env"
    free='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
    PET_MASTER_PORT=$("$1" -c "$free") || exit 1
    export PET_MASTER_PORT PET_NNODES="$SLURM_JOB_NUM_NODES" SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
    [ -n "${SLURM_CPUS_PER_TASK:-}" ] || unset SRUN_CPUS_PER_TASK
    each="srun --export=ALL --mpi=none --nodes=$PET_NNODES --ntasks=$PET_NNODES --ntasks-per-node=1"
    # shellcheck disable=SC2016
    begin='export PET_NODE_RANK="$SLURM_NODEID" PET_MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR"; exec "$@"'
    if [ "$kind" = nodes ]; then
        $each --kill-on-bad-exit=1 --wait=0 sh -c "$begin" sh "$@"
        code=$?
    else
        shift
        # shellcheck disable=SC2016
        begin='export MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR" MASTER_PORT="$PET_MASTER_PORT" NODE_RANK="$SLURM_NODEID"
            '"$begin"
        # In a separate session, because a signal to srun itself would kill at once a command that may want to save.
        setsid $each --kill-on-bad-exit=1 --wait=0 sh -c "$begin" sh "$@" &
        srun=$!
        for name in TERM INT HUP QUIT USR1 USR2; do
            # shellcheck disable=SC2064
            trap "scancel --signal=$name $SLURM_JOB_ID" "$name"
        done
        while wait "$srun"; code=$?; kill -0 "$srun" 2>/dev/null; do :; done
    fi
    left=60
    # Slurm ends the job of a dead node once it has noticed: until then, do not report this as the command's own end.
    until [ "$code" -eq 0 ] || timeout 30 $each true || [ "$left" -le 0 ]; do
        left=$((left - 1))
        sleep 5
    done
    exit "$code"
fi
cd -- "$1" || exit 1
idle=0 most=$2
hand=${SLURM_ARRAY_TASK_ID:-0}
if [ "$hand" -gt 0 ]; then
    mkdir -p hands && mkdir "hands/$hand.begun" && echo "$SLURM_JOB_ID" >"hands/$hand" || exit 1
    # A shared file system may cache for a minute that a name does not exist, so list each folder.
    until ls agent 2>/dev/null | grep -qxF exit.json || ls calls 2>/dev/null | grep -qxF leave.run; do
        idle=$((idle + 10))
        if [ -e hands/until ]; then
            [ "$(date +%s)" -lt "$(cat hands/until)" ] || exit 0
        elif [ "$idle" -gt "$most" ]; then
            exit 0
        fi
        sleep 1
    done
    exit 0
fi
# Requeued by an admin, or submitted twice, it would train a second time, under a lease that gpurun does not count.
mkdir begun || exit 1
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    mkdir -p hands
    echo "$(($(date +%s) + $5))" >hands/until
    printf '%s\n' "$3" >hands/setup
fi
# A set-up that fails ends the job, and `setup.failed` has its exit code: nothing may run without the set-up.
trap 'echo "$?" >setup.failed' EXIT
eval "$3" >setup-table.log 2>&1 || exit
enter_image() {
    engine=$(command -v apptainer || command -v singularity) || {
        echo "neither apptainer nor singularity is in the PATH of $(hostname)"
        return 127
    }
    image=$1
    case $image in
        *://*) "$engine" pull image.sif "$image" && image=$(pwd -P)/image.sif || return ;;
    esac
    echo '#!/bin/sh' >in-image
    # The agent does not pass on the variables of the engine's binds and cache; a possible password stays out of the file.
    export -p | sed 's/^declare -x /export /' | grep -E '^export (APPTAINER|SINGULARITY)' | grep -v DOCKER_ >>in-image
    echo "exec $engine --silent exec --nv --bind '$(pwd -P)' --pwd \"\$PWD\" '$image' \"\$@\"" >>in-image
    cat >in-image-python <<'end'
#!/bin/sh
# shellcheck disable=SC2016
find='for name in python3 python; do command -v "$name" >/dev/null && exec "$name" "$@"; done
    echo "the image has neither python3 nor python" >&2; exit 127'
exec "$(dirname -- "$0")/in-image" sh -c "$find" sh "$@"
end
    chmod 700 in-image in-image-python
    ./in-image true
}
if [ -n "$4" ]; then
    trap 'echo "$? image" >setup.failed' EXIT
    enter_image "$4" >>setup-table.log 2>&1 || exit
fi
trap - EXIT
# The agent does not pass these on to the programs that it starts. bash prints `declare -x` instead of `export`.
export -p | sed 's/^declare -x /export /' | grep -E '^export (SLURM|NCCL|GLOO)' >job.env
mkdir -p calls
run_call() {
    sh "$1/call" <"$1/in" >"$1/out" 2>"$1/err"
    echo "$?" >"$1/code"
    mv -- "$1" "${1%.run}.done"
}
while [ -d calls ]; do
    for go in calls/*.go; do
        run="${go%.go}.run"
        # The pilot of a successful job is told to exit, not cancelled, so accounting lists the job as completed.
        if [ "$go" = calls/leave.go ] && mv -- "$go" "$run"; then exit 0; fi
        if [ -d "$go" ] && mv -- "$go" "$run"; then
            run_call "$run" &
        fi
    done
    for run in calls/*.run; do
        if [ -d "$run" ]; then idle=0; fi
    done
    idle=$((idle + 1))
    if [ "$idle" -gt "$most" ] && { ! [ -e agent/job.json ] || [ -e agent/exit.json ]; }; then exit 0; fi
    sleep 0.1
done
