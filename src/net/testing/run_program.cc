#include "net/testing/run_program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace quire {

pid_t SpawnProgram(const std::vector<std::string>& command, int output) {
  std::vector<char*> argv;
  for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  execvp(argv[0], argv.data());
  _exit(127);
}

int RunProgram(const std::vector<std::string>& command) {
  const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  const pid_t pid = SpawnProgram(command, null);
  close(null);
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace quire
