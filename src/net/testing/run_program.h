// Programs that tests start.
#ifndef QUIRE_NET_TESTING_RUN_PROGRAM_H_
#define QUIRE_NET_TESTING_RUN_PROGRAM_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace quire {

// Starts a program, with what it says going to `output`. It dies with this process, even if a test
// is killed.
pid_t SpawnProgram(const std::vector<std::string>& command, int output);

// Runs a program without output; its exit status.
int RunProgram(const std::vector<std::string>& command);

}  // namespace quire

#endif  // QUIRE_NET_TESTING_RUN_PROGRAM_H_
