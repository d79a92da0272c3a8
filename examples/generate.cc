// Token ids in, token ids out: example_generate MODEL_DIR ID...
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "quire/engine.h"

quire::Status Run(const char* directory, const std::vector<int32_t>& prompt) {
  quire::EngineOptions options;
  options.model_directory = directory;
  QUIRE_ASSIGN_OR_RETURN(auto engine, quire::Engine::Create(options));
  quire::SamplingOptions sampling;
  sampling.max_tokens = 32;
  QUIRE_ASSIGN_OR_RETURN(const int64_t request, engine->Submit(prompt, sampling));
  (void)request;
  while (!engine->Idle()) {
    QUIRE_ASSIGN_OR_RETURN(auto outputs, engine->Step());
    for (const quire::StepOutput& output : outputs) {
      for (const int32_t token : output.tokens) std::printf("%d ", token);
    }
    std::fflush(stdout);
  }
  std::printf("\n");
  return quire::Status();
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s MODEL_DIR ID...\n", argv[0]);
    return 2;
  }
  std::vector<int32_t> prompt;
  for (int i = 2; i < argc; ++i) prompt.push_back(static_cast<int32_t>(std::atoi(argv[i])));
  const quire::Status status = Run(argv[1], prompt);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
