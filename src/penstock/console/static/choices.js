// Shows of a form with `data-choices="name"` only what belongs to the choice that is made.
for (const form of document.querySelectorAll("form[data-choices]")) {
  const show = () => {
    const chosen = new FormData(form).get(form.dataset.choices);
    for (const each of form.querySelectorAll("[data-choice]")) {
      each.hidden = each.dataset.choice !== chosen;
      // What is not shown is not sent.
      for (const field of each.querySelectorAll("input, textarea, select")) field.disabled = each.hidden;
    }
  };
  form.addEventListener("change", show);
  show();
}
